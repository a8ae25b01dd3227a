// Stands in for all that MoeRunnerTypes and makeRunner need of CUDA, CUTLASS and TVM FFI, so that they compile as host
// code. A runner is complete only where HOLDS says so: a use of any other one does not compile, as it would not link.
#include <iostream>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <type_traits>
#include <utility>

#define ENABLE_BF16
#define ENABLE_FP8
#define ENABLE_FP4

struct half;
struct __nv_bfloat16;
struct __nv_fp8_e4m3;
namespace cutlass {
struct uint4b_t;
}
namespace kernels {
struct Fp4Type;
enum class Sm90Wfp4Afp8ScaleMode { kDisabled, kHummingPreMmaE8M0 };
struct CutlassMoeFCRunnerInterface {
  virtual ~CutlassMoeFCRunnerInterface() = default;
};
template <typename T, typename WeightType, typename Output = T, typename Input = T, typename BackBone = Output,
          bool IsMXFPX = false, Sm90Wfp4Afp8ScaleMode Mode = Sm90Wfp4Afp8ScaleMode::kDisabled, typename Enable = void>
struct CutlassMoeFCRunner;
#define HOLDS(T, WEIGHT)                                                                                    \
  template <typename O, typename I, typename B, bool X, Sm90Wfp4Afp8ScaleMode M>                            \
  struct CutlassMoeFCRunner<T, WEIGHT, O, I, B, X, M, void> : CutlassMoeFCRunnerInterface {};
}  // namespace kernels

struct NotImplementedError {
  std::ostringstream text;
  ~NotImplementedError() noexcept(false) { throw std::runtime_error(text.str()); }
};
template <typename Part>
NotImplementedError&& operator<<(NotImplementedError&& error, Part const& part) {
  error.text << part;
  return std::move(error);
}
#define TVM_FFI_LOG_AND_THROW(KIND) KIND()
