"""The composition root: where the parts are made and meet, and the pipeline that names the stages in order."""
