"""A small model that proves a process group and a padding plan together, without an engine."""
