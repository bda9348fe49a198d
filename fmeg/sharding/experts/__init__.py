"""Partitioning of rows sorted by expert: expert parallelism is where the layout puts the experts.

Let the experts be sharded by mesh axes A. Of those, X shard tokens as well, and G do not: tokens are the same on the
ranks of G, or are made so by a gather (`dispatch="all_gather"` gathers them over all of A that shard them). Then

    dispatch   a rank takes the slots whose experts lie at its own place on G, sorts them, and sends them over X
    rows       lie with their experts, those of one expert in the order (rank on X, slot): sharded by A, and by the axes
               that shard tokens and no experts
    combine    sends rows back over X and adds them up: a sum that is pending over G

Dispatch and combine are each other's transposes, so gradients travel the same two ways. How many rows a rank has is
known only as the program runs: types say an even share, tensors are longer or shorter, and what acts on them must not
have its size written in it. One table of counts a routing goes to the host, and is kept for the backward pass.

With `dispatch_bound` a rank has room for so many rows from each other, and the host reads nothing. Rows that do not fit
make all rows of their sender NaN.

counts      the tables of counts and orders that a rank computes: no mesh, no Partitioner
wire        what the partitioner knows of a routing: `Wire`; where its tokens and rows lie
route       the routing itself
travel      dispatch, collect, combine and its gradient: tokens to rows and back
products    the grouped products, their biases and sums
places      where a row is among those of its expert
scaled      the products in low precision, and how rows are quantised for them
handlers    which of these a node is for
"""
