"""Settings of verl, translated to Paceline's: `table` has an entry per name, which `verl` applies;
`groups` and `algorithm_groups` have what depends on several of them, `hydra` reads overrides and
scripts, `toml` writes a recipe."""
