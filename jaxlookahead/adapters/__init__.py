"""Models defined elsewhere as a `Model`: one module for each package, imported where it is used."""
