"""`skerry worker`: from a folder with wrangler's configuration to Workers on every edge of a world.

`wrangler` reads the configuration, `build` makes a bundle of the code, `fleet` brings it to all
edges or to none; `dev`, `tail` and `new` are what an application's developer has beside that.
"""
