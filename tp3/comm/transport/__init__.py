"""How bytes move between ranks: host shared memory, and the engines that r4d delegates to."""
