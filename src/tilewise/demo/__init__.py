"""The main job: a real T5 model on a long document, as transformers runs it and patched."""
