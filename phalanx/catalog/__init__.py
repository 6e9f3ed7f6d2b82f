"""Models, accelerators and clusters as TOML files, each number with its source."""
