"""The hot operations, one file each, torch first. Every function takes float64 too, so that it can be its own proof."""
