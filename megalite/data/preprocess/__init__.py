"""Raw text to token files: cut, tokenize in worker processes, write in the order of the input, go on after a kill."""
