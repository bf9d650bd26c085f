"""A generated suite of visual questions: the same on every machine, from seeds, without a download.

>>> from mmaccel.suite import make_item
>>> item = make_item("existence", "test", 0)
>>> item.pictures(112)[0].shape
(112, 112, 3)
"""

from mmaccel.suite.clip import Clip, render_clip
from mmaccel.suite.document import Document, render_document
from mmaccel.suite.files import Sample, export, read_samples, write_video
from mmaccel.suite.items import DOCUMENT_TASKS, IMAGE_TASKS, VIDEO_TASKS, Item, is_right, make_item, make_suite, overlap
from mmaccel.suite.pages import PAGE_KINDS, Page, make_page
from mmaccel.suite.questions import Turn, vocabulary
from mmaccel.suite.rng import SPLITS, Rng, item_seed
from mmaccel.suite.scene import Scene, cell_labels, render, sample_scene
from mmaccel.suite.screens import make_screens

__all__ = [
    "DOCUMENT_TASKS",
    "IMAGE_TASKS",
    "PAGE_KINDS",
    "SPLITS",
    "VIDEO_TASKS",
    "Clip",
    "Document",
    "Rng",
    "Item",
    "Page",
    "Sample",
    "Scene",
    "Turn",
    "cell_labels",
    "export",
    "is_right",
    "item_seed",
    "make_item",
    "make_page",
    "make_screens",
    "make_suite",
    "overlap",
    "read_samples",
    "render",
    "render_clip",
    "render_document",
    "sample_scene",
    "vocabulary",
    "write_video",
]
