<<<<<<< HEAD
"""The command line."""
=======
"""The command line: `main` finds the command, each other module is one command."""
>>>>>>> 4ce2b3c
