"""An independent check of a run directory. It reads files and shares no code with the run but the
reader of lines, so that an error of the run is not repeated here."""
