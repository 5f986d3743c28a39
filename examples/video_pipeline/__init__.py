"""A text-to-video pipeline that does not fit on its card, and does once its idle components are parked.

``python -m examples.video_pipeline`` shows it on a fake card, so no GPU is needed. It is written as a project that
depends on ``park_core`` and ``pytest_park`` would write it: public names only.

============== ===================================================================================
components.py  the text encoder (real weights), the DiT and the VAE, and which of their layers stream
pipeline.py    text-encode, denoise, decode: each stage inside ``ComponentResidencyManager.use()``
stages.py      what one stage cost: peak, headroom, parking decision, bytes moved, seconds
runs.py        the same request on a large card, and on a small one without and with parking
table.py       the runs as text
picture.py     the runs as a picture of device memory over time
============== ===================================================================================
"""
