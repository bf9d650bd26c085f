"""Questions about many videos: ``questions`` in, ``qa`` or, on Ray, ``cluster``, ``answers`` out."""
