"""The command line: `krnet plan`, `record`, `info`, `verify`, `replay`, `learn`, `demo` and `bench`."""
