"""Settings of verl, translated to Paceline's: `verl` has the table of names, `groups` and
`algorithm_groups` what depends on several of them, `hydra` reads overrides and scripts, `toml`
writes a recipe."""
