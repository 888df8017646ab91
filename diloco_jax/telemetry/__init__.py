"""What a run writes down about itself, and what people read of it.

Writers: `tape`, `metrics`, `processes`. Readers: `view` (a run in progress),
`folder` (a whole run). Made from them: `progress`, `summary`, `report`.
"""
