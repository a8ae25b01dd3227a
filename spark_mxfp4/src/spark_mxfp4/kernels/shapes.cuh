// The shapes of the grouped product by number; tuned.json chooses among them. Each is compiled in a file of its own.
//         number, rows of 64, split of the columns, chunks a step, tokens, stages, blocks a multiprocessor, registers
#define SPARK_SHAPES                        \
  SPARK_UNIT(0, 4, 1, 5, 16, 3, 1)         \
  SPARK_UNIT(1, 4, 1, 5, 24, 3, 1)         \
  SPARK_UNIT(2, 4, 1, 3, 48, 4, 1)         \
  SPARK_UNIT(3, 3, 1, 3, 64, 4, 1)         \
  SPARK_UNIT(4, 2, 1, 1, 96, 6, 2)         \
  SPARK_UNIT(5, 3, 1, 1, 144, 9, 1, 152)   \
  SPARK_UNIT(6, 3, 1, 1, 192, 6, 1, 152)

namespace spark {
#define SPARK_UNIT(number, ...) int unit_##number(const Gemm*, int, int, cudaStream_t);
SPARK_SHAPES
#undef SPARK_UNIT
}  // namespace spark
