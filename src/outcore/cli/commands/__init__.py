"""commands: one file for each command. The folder above holds what several of them share."""
