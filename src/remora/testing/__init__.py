"""Tools to test programs that use Remora, and Remora itself."""
