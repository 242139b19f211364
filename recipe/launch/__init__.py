"""How processes become ranks: launcher variables, shared memory, the place where they meet, hostfiles."""
