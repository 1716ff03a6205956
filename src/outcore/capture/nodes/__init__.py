"""nodes: facts about the nodes of a joint graph."""
