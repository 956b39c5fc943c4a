"""The collectives as rounds over shared memory: functions of a transport and flat tensors, one idea
per file.
"""
