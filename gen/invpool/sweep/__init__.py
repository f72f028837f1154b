"""The autotuning sweep: which plans of a spec are fastest, and right, on the GPU that is there.

    space ──► search ──► compile ──► measure (a process of its own) ──► records ──► tuned table

``space`` lists what may be tried, ``search`` says what next, a crew measures it, ``records`` keeps what came of it, and
``session`` drives them. Nothing here touches CUDA in the caller's process.
"""
