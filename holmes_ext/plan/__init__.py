"""Plan of a job: its sizes, the placement of its stages, its cost model and its partition. No torch here."""
