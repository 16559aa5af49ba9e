"""Features in a folder of shards: many files of bounded size, and an index of them."""
