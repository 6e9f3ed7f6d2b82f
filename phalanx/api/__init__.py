"""The public functions, each in a module that is imported when it is first asked for."""
