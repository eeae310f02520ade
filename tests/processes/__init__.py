"""What only real processes can show: death, broken connections, strangers, slow readers, forks, signals, shutdown."""
