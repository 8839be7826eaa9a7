/* kernels/crc.c - CRC-32C (Castagnoli) by tables, eight bytes at a time. */
#include "base/num.h"
#include "kernels/impl.h"

static const uint32_t polynomial = 0x82f63b78u; /* bits reversed */

/* crc_table[k][b]: the remainder of byte b with k zero bytes after it. */
static uint32_t crc_table[8][256];

void sl_crc32c_fill(void)
{
    for (uint32_t b = 0; b < 256; b++) {
        uint32_t crc = b;
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (polynomial & -(crc & 1));
        crc_table[0][b] = crc;
    }
    for (uint32_t b = 0; b < 256; b++)
        for (int k = 1; k < 8; k++)
            crc_table[k][b] = crc_table[k - 1][b] >> 8 ^ crc_table[0][crc_table[k - 1][b] & 255];
}

uint32_t sl_ref_crc32c(const uint8_t *p, size_t n)
{
    uint32_t crc = ~0u;
    for (; n >= 8; p += 8, n -= 8) {
        const uint32_t low = crc ^ sl_le32(p), high = sl_le32(p + 4);
        crc = crc_table[7][low & 255] ^ crc_table[6][low >> 8 & 255] ^ crc_table[5][low >> 16 & 255] ^
              crc_table[4][low >> 24] ^ crc_table[3][high & 255] ^ crc_table[2][high >> 8 & 255] ^
              crc_table[1][high >> 16 & 255] ^ crc_table[0][high >> 24];
    }
    for (; n; p++, n--)
        crc = crc >> 8 ^ crc_table[0][(crc ^ *p) & 255];
    return ~crc;
}
