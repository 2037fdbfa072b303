"""`dcl serve`: attribution over HTTP. Needs the extra `[serve]`; imported on use only."""
