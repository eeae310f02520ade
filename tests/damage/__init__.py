"""Damaged bytes: what a worker does when what arrives is not what was sent.

    sessions    programs whose traffic is captured, live, each time; what they yield is known
    units       a captured stream cut into handshake messages and frames, and the fields of a header
    mutations   what happens to bytes: bits flipped, numbers at their limits, parts lost, doubled, moved, pickles rewritten
    receivers   the parsers of the package, each fed with bytes directly: thousands a second
    proxy       a man in the middle of every connection of this process, who damages one unit
    trials      two workers, one damaged unit: an error or the right value in time, and all is well afterwards
    subject     a process in which all that happens; its death, its silence and its growth are findings
    hunt        one search for findings, by seed: `make fuzz`

A *damaged* byte is one that a wire, a kernel or a bug changed. A *hostile member* is another matter: it knows the group's
secret, so it may have any code run anyway. What is sealed against damage is mutated twice: as it is, which the seal must
notice; and with a fresh seal, which stands for a member with a bug and must still crash nothing.
"""
