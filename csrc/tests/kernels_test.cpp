// Compares the fused kernels on the CPU, run by several threads, with plain loops in double. It is
// built with sanitizers.
//
//   c++ -std=c++17 -g -fsanitize=address,undefined -DCONSISTENT_CLONES= csrc/tests/kernels_test.cpp
//       csrc/kernels/{split_cross_entropy,masked_embedding,reduce_shards}_cpu.cpp -lpthread

#include <algorithm>
#include <thread>

#include "kernel_cases.h"

namespace consistent {
namespace {

constexpr int kThreads = 3;

// Calls run(begin, end) for parts of `count` from several threads.
template <class Run>
void share(int64_t count, const Run& run) {
  if (count == 0) return run(0, 0);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] { run(count * t / kThreads, count * (t + 1) / kThreads); });
  }
  for (std::thread& thread : threads) thread.join();
}

int64_t complain(const char* what, Dtype dtype, size_t number, int64_t wrong) {
  if (wrong)
    printf("%s, dtype %d, case %zu: %lld wrong\n", what, int(dtype), number, (long long)wrong);
  return wrong;
}

int64_t check_cross_entropy(Dtype dtype, const ClassSplit& split, size_t name) {
  const int64_t rows = split.outer * split.inner, elements = rows * split.held;
  const Dtype real = real_of(dtype);
  const Bytes x = numbers(elements, dtype, 3), w = numbers(split.held, real, 4);
  const std::vector<int64_t> target = targets(split);
  const int planes = split.smooth ? kSmoothPlanes : kPlanes;
  Bytes said(size_t(planes * rows * size_of(real))), made(x.size());
  const Bytes by = numbers(4 * rows, real, 5);
  const void* weight = split.smooth ? w.data() : nullptr;
  share(rows, [&](int64_t begin, int64_t end) {
    split_cross_entropy_cpu(said.data(), dtype, x.data(), target.data(), weight, split, begin, end);
  });
  share(rows, [&](int64_t begin, int64_t end) {
    split_cross_entropy_backward_cpu(made.data(), dtype, x.data(), target.data(), by.data(), weight,
                                     split, begin, end);
  });
  int64_t wrong = 0;
  const auto differs = [&](double a, double b, double tolerance) {
    return !(std::fabs(a - b) <= tolerance * (1 + std::fabs(b))) && a != b;
  };
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t o = row / split.inner, i = row % split.inner;
    double top = -INFINITY, total = 0, weighted = 0, weights = 0, picked = 0;
    const auto at = [&](int64_t c) { return (o * split.held + c) * split.inner + i; };
    const auto plane = [&](const Bytes& from, int p) { return number(from, real, p * rows + row); };
    for (int64_t c = 0; c < split.held; ++c) top = std::max(top, number(x, dtype, at(c)));
    const double reference = split.held ? top : 0;
    for (int64_t c = 0; c < split.held; ++c) {
      const double value = number(x, dtype, at(c)), v = weight ? number(w, real, c) : 1;
      const bool hit = c == target[size_t(row)] - split.start;
      total += std::exp(value - reference);
      weighted += v * (value - reference), weights += v;
      if (hit) picked = value;
      const double wanted = std::exp(value - plane(by, 0)) * plane(by, 1) - v * plane(by, 2) -
                            (hit ? plane(by, 3) : 0);
      wrong += differs(number(made, dtype, at(c)), wanted, tolerance_of(dtype));
    }
    wrong += plane(said, 0) != top || plane(said, 2) != picked;
    wrong += differs(plane(said, 1), total, 1e-5);
    if (split.smooth) {
      wrong += differs(plane(said, 3), weighted, 1e-3) || differs(plane(said, 4), weights, 1e-3);
    }
  }
  return complain("cross-entropy", dtype, name, wrong);
}

int64_t check_embedding(Dtype dtype, const Look& look, size_t name) {
  const auto [width, start, held] = look.window;
  const std::vector<int64_t> index = indices(look);
  const Bytes table = numbers(held * width, dtype, 6), grad = numbers(look.count * width, dtype, 7);
  std::vector<int64_t> row, order;
  sort_rows(look, index, row, order);
  const SortedRows sorted{row.data(), order.data(), look.count};
  int64_t wrong = 0;
  for (double scale : {1.0, 0.5}) {
    Bytes out(grad.size()), back(table.size(), 1);  // every row must be written
    share(look.count, [&](int64_t begin, int64_t end) {
      masked_embedding_cpu(out.data(), dtype, table.data(), index.data(), scale, look.window, begin,
                           end);
    });
    share(look.count, [&](int64_t begin, int64_t end) {
      masked_embedding_backward_cpu(back.data(), dtype, grad.data(), sorted, scale, scale != 1,
                                    look.window, begin, end);
    });
    std::vector<double> sums(size_t(held * width)), counts(size_t(held) + 1);
    for (int64_t i = 0; i < look.count; ++i) {
      const int64_t r = index[size_t(i)] - start;
      const bool own = r >= 0 && r < held, added = own && r != look.padding_row;
      if (added) ++counts[size_t(r)];
      for (int64_t c = 0; c < width; ++c) {
        const double wanted = own ? scale * number(table, dtype, r * width + c) : 0;
        wrong += std::fabs(number(out, dtype, i * width + c) - wanted) > tolerance_of(dtype);
        if (added) sums[size_t(r * width + c)] += number(grad, dtype, i * width + c);
      }
    }
    for (int64_t at = 0; at < held * width; ++at) {
      const double count = scale != 1 ? std::max(1.0, counts[size_t(at / width)]) : 1;
      const double wanted = sums[size_t(at)] * scale / count;
      const double off = std::fabs(number(back, dtype, at) - wanted);
      wrong += off > 2 * tolerance_of(dtype) * (1 + std::fabs(wanted));
    }
  }
  return complain("embedding", dtype, name, wrong);
}

double activated(Activation kind, double x) {
  double made = x;
  visit_activation(kind, [&](auto of) { made = activate<decltype(of)::value>(x); });
  return made;
}

int64_t check_reduce(Dtype dtype, const Fused& it, size_t name) {
  const FusedInputs given(it, dtype);
  const RowsOfSlice& slice = it.slice;
  const Epilogue epilogue = epilogue_of(it, given, [](const Bytes& x) { return x.data(); });
  Parts parts;
  parts.count = it.parts, parts.dtype = dtype;
  for (int p = 0; p < it.parts; ++p) parts.data[p] = given.parts[size_t(p)].data();
  Bytes out(size_t(slice.rows * slice.columns * size_of(dtype))), total(out.size());
  share(slice.rows, [&](int64_t begin, int64_t end) {
    reduce_shards_cpu(out.data(), total.data(), dtype, parts, epilogue, slice, begin, end);
  });
  int64_t wrong = 0;
  const double close = 4 * tolerance_of(dtype);
  for (int64_t r = 0; r < slice.rows; ++r) {
    std::vector<double> row(size_t(slice.columns));
    double mean = 0, square = 0;
    for (int64_t c = 0; c < slice.columns; ++c) {
      const int64_t at = r * slice.columns + c;
      double sum = 0;
      for (const Bytes& part : given.parts) sum += number(part, dtype, slice.start(r) + c);
      if (it.beside) {
        sum = sum * 0.5 + number(given.bias, real_of(dtype), c) + number(given.residual, dtype, at);
      }
      wrong += std::fabs(number(total, dtype, at) - sum) > close * (1 + std::fabs(sum));
      row[size_t(c)] = activated(it.activation, sum);
      mean += row[size_t(c)] / double(slice.columns);
    }
    if (it.norm != Norm::layer) mean = 0;
    for (double x : row) square += (x - mean) * (x - mean) / double(slice.columns);
    for (int64_t c = 0; c < slice.columns; ++c) {
      double wanted = row[size_t(c)];
      if (it.norm != Norm::none) wanted = (wanted - mean) / std::sqrt(square + 1e-5);
      if (!given.weight.empty()) {
        wanted = wanted * number(given.weight, real_of(dtype), c) +
                 number(given.norm_bias, real_of(dtype), c);
      }
      const double got = number(out, dtype, r * slice.columns + c);
      wrong += std::fabs(got - wanted) > close * (1 + std::fabs(wanted));
    }
  }
  return complain("reduce_shards", dtype, name, wrong);
}

}  // namespace
}  // namespace consistent

int main() {
  using namespace consistent;
  int64_t wrong = 0;
  for (Dtype dtype : kFloats) {
    size_t name = 0;
    for (const ClassSplit& split : class_splits())
      wrong += check_cross_entropy(dtype, split, name++);
    name = 0;
    for (const Look& look : looks()) wrong += check_embedding(dtype, look, name++);
    name = 0;
    for (const Fused& it : fused_cases()) wrong += check_reduce(dtype, it, name++);
  }
  printf(wrong ? "kernels differ from the plain loops\n" : "kernels agree with the plain loops\n");
  return wrong != 0;
}
