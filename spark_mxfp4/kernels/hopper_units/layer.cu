// The kernels that compute a whole layer; hopper.py says when which of them runs.
#include "../launch.cuh"
#include "../layer.cuh"

namespace spark {

//                       rows of 64, split of the columns, chunks a step, tokens, stages, blocks a multiprocessor
using Wide = Shape<3, 1, 5, 8, 5, 1>;
using Narrow = Shape<1, 2, 3, 8, 5, 2>;  // where a layer has too few rows for the wide one to keep all blocks busy

template <class S>
cudaError_t run(const Layer& l, int processors, cudaStream_t stream) {
  const auto kernel = whole_layer<S>;
  if (const cudaError_t error = allow_shared(kernel, S::SHARED_BYTES)) return error;
  return launch_together(kernel, dim3(processors * S::BLOCKS), LAYER_THREADS<S>, S::SHARED_BYTES, stream, l);
}

int layer_chunks(int narrow) { return narrow ? Narrow::CHUNKS : Wide::CHUNKS; }
int layer_rows(int narrow) { return narrow ? Narrow::ROW_GROUPS : Wide::ROW_GROUPS; }
int layer(const Layer* l, int narrow, int processors, cudaStream_t stream) {
  return narrow ? run<Narrow>(*l, processors, stream) : run<Wide>(*l, processors, stream);
}

}  // namespace spark
