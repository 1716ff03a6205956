"""pooch: PoocH, what it compares itself against, and policies that use its model of a step."""
