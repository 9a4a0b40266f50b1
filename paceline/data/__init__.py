"""What the policy is asked: prompt files, chat templates, built-in tasks and the tiny model that goes with them."""
