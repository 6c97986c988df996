"""Lightning's contract, once for all strategies: five classes, each on the one before.

=========================  =========================================================================
``ProcessMesh``            processes, groups along the mesh, reductions
``DistributedStrategy``    one run of all ranks: their loaders, random numbers and failures
``AsyncSaving``            checkpoints that a thread writes
``LayoutFreeCheckpoints``  checkpoints that mean the same under every layout
``RunSetup``               the one ``setup``; its hooks are what a new strategy fills in
=========================  =========================================================================
"""
