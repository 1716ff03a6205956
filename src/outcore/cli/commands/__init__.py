"""The commands, a file each; what several share lies beside this folder."""
