"""Sources of draft trees. All run on the host, in plain Python and numpy."""
