"""One file per operator, or per family that shares its machinery."""
