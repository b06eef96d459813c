"""The replicated state machine: a pure function of the commands applied to it. No I/O, clocks, randomness."""
