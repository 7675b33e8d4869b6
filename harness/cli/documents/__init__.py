"""The JSON that commands print, as types, a module for each group of commands. The commands make their objects elsewhere."""
