"""Code that runs in workers, in a directory without packages named like libraries."""
