"""The files of the workflow, as pydantic models, and how they are read and written.

recipe.yaml -> profile.json -> fit.json -> tuning.json -> plan.json. Each JSON file carries
`schema_version`, the tool's version, the environment it was made in and the sha256 of its inputs
(`envelope`).
"""
