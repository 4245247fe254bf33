"""The command line, one thin file per command: parse, load, call one function, save, print."""
