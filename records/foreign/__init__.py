"""Records of other projects, as they are."""
