"""The syncer: merges fragments, steps the outer optimizer, broadcasts."""
