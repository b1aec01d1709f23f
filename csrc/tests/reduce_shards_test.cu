// Compares the fused sum on CUDA with the CPU. Then it times it with each epilogue, for 4 and 8
// parts of 64 MB in bf16, with vectors in float32 and in bf16. With any argument it does not time,
// for runs under compute-sanitizer.
//
//   nvcc -std=c++17 -O3 -arch=native -fmad=false -Xcompiler -ffp-contract=off
//       csrc/tests/reduce_shards_test.cu csrc/kernels/reduce_shards.cu
//       csrc/kernels/reduce_shards_cpu.cpp -o reduce_shards_test

#include <string>

#include "device.cuh"
#include "kernel_cases.h"

namespace consistent {
namespace {

// What begins one element after an aligned address. `all`: parts, residual and results.
enum class Skew { none, last_part, vectors, all };

// The alignment and the contents of the memory of a case.
struct Memory {
  Skew skew;
  bool special;         // the first part has infinities and NaN
  bool total;           // `total` is computed too
  bool narrow = false;  // vectors have the parts' type
};

// Rounds the vectors to the parts' type; `there` stores them as that type, `here` as Real<T>.
struct RoundVectors {
  FusedInputs &here, &there;
  template <class T>
  void operator()(T) const {
    for (Bytes FusedInputs::* vector :
         {&FusedInputs::bias, &FusedInputs::weight, &FusedInputs::norm_bias}) {
      Bytes &wide = here.*vector, &narrow = there.*vector;
      const size_t count = wide.size() / sizeof(Real<T>);
      narrow.resize(count * sizeof(T));
      for (size_t i = 0; i < count; ++i) {
        Real<T> value;
        memcpy(&value, wide.data() + i * sizeof(value), sizeof(value));
        const T rounded = Storage<T>::store(value);
        value = Storage<T>::load(rounded);
        memcpy(narrow.data() + i * sizeof(T), &rounded, sizeof(T));
        memcpy(wide.data() + i * sizeof(value), &value, sizeof(value));
      }
    }
  }
};

int64_t compare(Dtype dtype, Dtype made_as, const Fused& it, const Memory& memory) {
  FusedInputs given(it, dtype);
  if (memory.special) visit_float_type(dtype, StoreSpecials{given.parts[0]});
  FusedInputs given_there = given;
  if (memory.narrow) visit_float_type(dtype, RoundVectors{given, given_there});
  const Epilogue here = epilogue_of(it, given, [](const Bytes& x) { return x.data(); });
  std::vector<DeviceBytes> kept;
  const auto copied = [&](const Bytes& x, size_t skew) {
    kept.emplace_back(x.data(), x.size(), skew);
    return static_cast<const void*>(kept.back().data);
  };
  const auto there = [&](const Bytes& x) {
    const size_t number = size_t(size_of(memory.narrow ? dtype : real_of(dtype)));
    const bool vector = x.size() == size_t(it.slice.columns) * number;
    if (vector && memory.skew == Skew::vectors) return copied(x, number);
    return copied(x, memory.skew == Skew::all && !vector ? size_t(size_of(dtype)) : 0);
  };
  Parts parts, copies;
  parts.count = copies.count = it.parts;
  parts.dtype = copies.dtype = dtype;
  for (int p = 0; p < it.parts; ++p) {
    parts.data[p] = given.parts[size_t(p)].data();
    const bool skewed = memory.skew == Skew::last_part && p == it.parts - 1;
    copies.data[p] = skewed ? copied(given.parts[size_t(p)], size_t(size_of(dtype)))
                            : there(given.parts[size_t(p)]);
  }
  Epilogue on_device = epilogue_of(it, given_there, there);
  on_device.narrow = memory.narrow;
  const size_t bytes = size_t(it.slice.rows * it.slice.columns * size_of(made_as));
  Bytes out(bytes), total(memory.total ? bytes : 0);
  reduce_shards_cpu(out.data(), memory.total ? total.data() : nullptr, made_as, parts, here,
                    it.slice, 0, it.slice.rows);
  const size_t skew = memory.skew == Skew::all ? size_t(size_of(made_as)) : 0;
  const DeviceBytes made(bytes, skew), sum(total.size(), skew);
  reduce_shards_cuda(made.data, memory.total ? sum.data : nullptr, made_as, copies, on_device,
                     it.slice, nullptr);
  const double close = 2 * tolerance_of(made_as);
  return apart(made.back(bytes), out, made_as, close) +
         apart(sum.back(total.size()), total, made_as, close);
}

// Compares with results of the parts' type, and for two-byte parts also of float32.
int64_t compare_both(Dtype dtype, const Fused& it, const Memory& memory) {
  const int64_t wrong = compare(dtype, dtype, it, memory);
  return size_of(dtype) == 2 ? wrong + compare(dtype, Dtype::f32, it, memory) : wrong;
}

int64_t compare_all(Dtype dtype, const Fused& it, bool is_once) {
  const Memory narrow{Skew::none, false, true, true};
  int64_t wrong = compare_both(dtype, it, {Skew::none, false, true});
  if (size_of(dtype) == 2) wrong += compare_both(dtype, it, narrow);
  if (is_once) return wrong;
  for (const Memory memory : {Memory{Skew::all, false, false}, {Skew::all, true, true}}) {
    wrong += compare_both(dtype, it, memory);
  }
  for (const Skew skew : {Skew::vectors, Skew::all}) {
    wrong += compare(dtype, dtype, it, {skew, false, true, true});
  }
  for (const Skew skew : {Skew::vectors, Skew::last_part}) {
    wrong += compare(dtype, dtype, it, {skew, false, false});
  }
  return wrong + compare(dtype, dtype, it, {Skew::none, true, false});
}

void timing(int count, bool narrow) {
  constexpr int64_t kRows = 8192, kColumns = 4096;
  const RowsOfSlice slice{kRows, kColumns, kRows, 0, 0};
  const size_t bytes = size_t(kRows * kColumns) * 2;
  std::vector<DeviceBytes> memory;
  Parts parts;
  parts.count = count, parts.dtype = Dtype::bf16;
  for (int p = 0; p < parts.count; ++p) {
    memory.emplace_back(bytes);
    CONSISTENT_CHECK_CUDA(cudaMemset(memory.back().data, 0, bytes));
    parts.data[p] = memory.back().data;
  }
  const DeviceBytes out(bytes), vector(size_t(kColumns) * 4);
  CONSISTENT_CHECK_CUDA(cudaMemset(vector.data, 0, size_t(kColumns) * 4));
  const auto run = [&](const std::string& what, const Epilogue& epilogue, int64_t more) {
    const std::string name = std::to_string(count) + (narrow ? ", bf16: " : ", f32: ") + what;
    time_beside_copy(name.c_str(), int64_t(bytes) * (parts.count + 1 + more), [&] {
      reduce_shards_cuda(out.data, nullptr, Dtype::bf16, parts, epilogue, slice, nullptr);
    });
  };
  Epilogue epilogue;
  epilogue.narrow = narrow;
  run("sum", epilogue, 0);
  epilogue.weight = vector.data, epilogue.norm = Norm::rms;
  run("sum, RMS norm", epilogue, 0);
  epilogue.norm = Norm::layer, epilogue.norm_bias = vector.data;
  run("sum, layer norm", epilogue, 0);
  epilogue.norm = Norm::none, epilogue.weight = epilogue.norm_bias = nullptr;
  epilogue.bias = vector.data, epilogue.residual = memory[0].data;
  run("sum, bias, residual", epilogue, 1);
  epilogue.activation = Activation::gelu;
  run("the same and gelu", epilogue, 1);
  epilogue.activation = Activation::silu;
  run("the same and silu", epilogue, 1);
  epilogue.activation = Activation::none;
  epilogue.weight = vector.data, epilogue.norm = Norm::rms;
  run("sum, residual, RMS norm", epilogue, 1);
  epilogue.norm = Norm::layer, epilogue.norm_bias = vector.data;
  run("sum, residual, layer norm", epilogue, 1);
}

}  // namespace
}  // namespace consistent

int main(int words, char** given) {
  using namespace consistent;
  int64_t wrong = 0;
  for (Dtype dtype : floats(words, given)) {
    for (const Fused& it : fused_cases()) wrong += compare_all(dtype, it, once(words, given));
  }
  printf(wrong ? "CUDA and CPU differ\n" : "CUDA and CPU agree\n");
  if (words < 2) {
    for (int parts : {4, 8}) timing(parts, false), timing(parts, true);
  }
  return wrong != 0;
}
