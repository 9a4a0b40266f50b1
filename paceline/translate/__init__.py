"""Settings of verl, translated to Paceline's: `verl` has the table of names, `groups` what depends
on several of them, `hydra` reads overrides and scripts, `toml` writes a recipe."""
