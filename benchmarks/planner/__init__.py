"""How near `search` comes to the least that is possible, and to the other policies; modelled."""
