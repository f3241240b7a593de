"""The command line: `main` finds the command, each other module is one command."""
