"""Raw text files found, cut into pieces of bounded size, and read into documents."""
