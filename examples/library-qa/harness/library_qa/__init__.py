"""An agent that answers questions about the Python standard library from the library's own files."""
