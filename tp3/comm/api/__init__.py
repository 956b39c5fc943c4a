"""The collectives as users mean them: check the arguments, then hand the group what to run."""
