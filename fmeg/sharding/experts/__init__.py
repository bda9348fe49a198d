"""Partitioning of rows sorted by expert: expert parallelism is where the layout puts the experts.

Let the experts be sharded by mesh axes A. Of those, X shard tokens as well, and G do not: tokens are the same on the
ranks of G, or are made so by a gather (`dispatch="all_gather"` gathers them over all of A that shard them). Then

    route      all ranks of X learn all choices of tokens on X: who sends what to whom, and in which order
    dispatch   a token is sent over X once to each rank that has some of its experts (those at the sender's own place on
               G); the rank that it comes to, or is, makes a row for each of these
    rows       lie with their experts, those of one expert in the order (rank on X, slot): sharded by A, and by the axes
               that shard tokens and no experts
    combine    adds up the rows that a rank made of a token, weighted, slots in their order; sends the sum back over X,
               and adds up a token's sums in the order of ranks: a sum that is pending over G

Dispatch and combine are each other's transposes, so gradients travel the same two ways. How many tokens and rows a rank
has is known only as the program runs: types say as many as come if all choices are equally likely, and an even share;
tensors are longer or shorter, and what acts on them must not have its size written in it. One table of sizes a routing
goes to the host, and is kept for the backward pass.

With `dispatch_bound` there is room for so many tokens of each other rank and so many rows in all, and the host reads
nothing. Tokens that do not fit make all tokens of their sender NaN, rows that do not fit all rows of their rank.

copies      which ranks a token goes to, which rows a rank makes of what comes: no mesh, no Partitioner
wire        what the partitioner knows of a routing: `Wire`; where its tokens and rows lie
route       the routing itself
travel      dispatch, collect, combine and its gradient: tokens to rows and back
products    the grouped products, their biases and sums
places      where a row is among those of its expert
scaled      the products in low precision, and how rows are quantised for them
handlers    which of these a node is for
"""
